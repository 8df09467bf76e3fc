"`python -m course_lib.reproduce MANIFEST`: repeat a run."

import sys

from course_lib import reproduce

sys.exit(reproduce.main(sys.argv[1:]))
