"""`python -m app` is `widebeam`."""

from app.cli.main import run

if __name__ == "__main__":
    run()
