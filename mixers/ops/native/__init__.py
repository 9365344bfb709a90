"""Operations for CPUs in C: a compiler makes them for the processor at hand."""
