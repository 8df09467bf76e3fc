"What lesson cuda keeps: kernels from strings of CUDA C++, and a model of a multiprocessor."

from course_lib.cuda.kernel import Kernel, KernelError  # noqa: F401
