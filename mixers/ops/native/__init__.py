"""Operations for CPUs in C, compiled for the machine's own processor."""
