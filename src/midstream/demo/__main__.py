"""`python -m midstream.demo`: the same as `midstream demo`."""

from midstream.demo.cli import main

if __name__ == "__main__":
    main()
