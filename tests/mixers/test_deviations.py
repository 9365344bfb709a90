"""Every layer says where it differs from its reference, and the committed table says the same."""

import pytest

from mixers import MIXERS
from mixers.base import Layer
from mixers.deviations import PAGE, TOPICS, deviations, page


@pytest.mark.parametrize("name", MIXERS)
def test_a_layer_names_its_reference_and_its_differences_in_the_order_of_the_topics(name: str) -> None:
    reference, points = deviations(MIXERS[name])
    assert any(source in reference for source in ("https://", "arXiv:", "torch.nn.", "doi:"))
    assert points
    order = [TOPICS.index(topic) for topic, _ in points]
    assert order == sorted(order)
    assert all(text.endswith(".") and "|" not in text for _, text in points)


def test_the_committed_table_is_that_of_the_docstrings() -> None:
    """If not: python -m mixers.deviations."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_points_go_on_over_several_lines() -> None:
    class Known(Layer):
        """A layer.

        Differs from the reference:
            A paper,
            arXiv:1.

            - block: theirs is
              another one.
            - added: a gate: it opens.
        """

    points = [("block", "theirs is another one."), ("added", "a gate: it opens.")]
    assert deviations(Known) == ("A paper, arXiv:1.", points)


@pytest.mark.parametrize(
    ("doc", "message"),
    [
        (None, "the docstring of Unknown has no section 'Differs from the reference:'"),
        ("A layer.\n\nDiffers from the reference:\n    - block: theirs.", "must begin with the reference"),
        ("A layer.\n\nDiffers from the reference:\n    A paper.\n\n    - colour: red.", "no topic 'colour'"),
    ],
)
def test_a_section_that_is_missing_or_has_another_form_is_refused(doc: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deviations(type("Unknown", (Layer,), {"__doc__": doc}))
