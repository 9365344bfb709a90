"""The elementwise linear recurrence that state-space layers have in common, and the layers whose decays are constant.

    h_t = a_t h_{t-1} + b_t

Dimensions beside those of ``mixers.base``: N states, X any further axes.
"""
