"""`python -m unbounded` is the command line."""

import sys

from unbounded.cli import main

sys.exit(main())
