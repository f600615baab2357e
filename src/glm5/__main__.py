"""``python -m glm5`` is the ``glm5`` command."""

from glm5.cli import main

if __name__ == "__main__":  # not in the processes that multiprocessing starts
    main()
