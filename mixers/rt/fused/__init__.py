"""The recurrence of RT layers in fused Triton kernels, at the sizes of the diagnostics."""
