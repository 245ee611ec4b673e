"""``python -m mindspeed_kda``."""

import sys

from mindspeed_kda.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
