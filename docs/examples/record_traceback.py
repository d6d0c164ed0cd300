"""The traceback of a rank that fails stands on torchrun's page.

torchrun --standalone --nproc-per-node 2 docs/examples/record_traceback.py           # all is well
torchrun --standalone --nproc-per-node 2 docs/examples/record_traceback.py --fail    # rank 1 fails
"""

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    """Trains; what it raises is written into a file that torchrun reads."""
    if "--fail" in sys.argv and os.environ["RANK"] == "1":
        raise ValueError("no labels")


if __name__ == "__main__":
    main()
