"""`python -m kvstored` is the `kvstored` command."""

from kvstored.cli import run

if __name__ == "__main__":
    run()
