"""The Recurrent Transformer's recurrence in chunks, with sequences side by side in memory: for the CPU."""
