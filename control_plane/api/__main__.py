"""``python -m control_plane.api``."""

from control_plane.api.main import main

if __name__ == "__main__":
    main()
