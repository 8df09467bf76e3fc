"""The lesson on Triton: what its figures and comparisons need; the kernels are in course_lib.kernels."""
