"""`python -m wager.cli` is `wager`."""

import sys

from wager.cli import main

sys.exit(main())
