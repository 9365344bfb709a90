"""The Recurrent Transformer's recurrence for CPUs, in C."""
