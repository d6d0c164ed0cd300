"""A signal prints where a process is, and the process goes on.

python docs/examples/faulthandler_traceback.py
"""

import faulthandler
import signal
import tempfile


def print_stack_on_signal(file):
    """From now on kill -USR1 PID prints the main thread's stack; sys.stderr is a good file."""
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)


def wait_for_others():
    signal.raise_signal(signal.SIGUSR1)  # as another terminal would while this process waits


def main():
    with tempfile.TemporaryFile("w+") as file:
        print_stack_on_signal(file)
        wait_for_others()
        file.seek(0)
        print(file.readlines()[1].split(", ")[1], end="")


if __name__ == "__main__":
    main()
