"""`python -m midstream.lab.demo`: the same as `midstream demo`."""

from midstream.lab.demo.cli import main

if __name__ == "__main__":
    main()
