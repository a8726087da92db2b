import sys

from midstream.demo.cli import main

if __name__ == "__main__":
    sys.exit(main())
