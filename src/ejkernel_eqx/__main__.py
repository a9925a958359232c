"""`python -m ejkernel_eqx`: see `ejkernel_eqx.cli.main`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
