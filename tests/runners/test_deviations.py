"""Every layer and the tasks say where they differ from their references, and the committed tables say the same."""

import pytest

from mixers import MIXERS
from runners.deviations import DATA, LAYERS, Page, deviations, text_of

PLACES = [(page, name) for page in (LAYERS, DATA) for name in page.registry]


@pytest.mark.parametrize(("page", "name"), PLACES, ids=[name for _, name in PLACES])
def test_references_and_differences_are_named_in_the_order_of_the_topics(page: Page, name: str) -> None:
    reference, points = deviations(page.registry[name])
    assert any(source in reference for source in ("https://", "arXiv:", "torch.nn.", "doi:"))
    assert points
    order = [page.topics.index(topic) for topic, _ in points]
    assert order == sorted(order)
    assert all(text.endswith(".") and "|" not in text for _, text in points)


@pytest.mark.parametrize("page", [LAYERS, DATA], ids=lambda page: page.kind)
def test_the_committed_table_is_that_of_the_docstrings(page: Page) -> None:
    """If not: python -m runners.deviations."""
    assert page.file.read_text(encoding="utf-8") == text_of(page)
    assert set(LAYERS.registry) == set(MIXERS)
