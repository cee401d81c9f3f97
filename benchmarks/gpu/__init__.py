"""Side-by-side GPU benchmarks: ``python -m benchmarks.gpu.bench --help``."""
