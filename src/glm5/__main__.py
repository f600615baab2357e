"""``python -m glm5`` is the ``glm5`` command."""

from glm5.cli import main

main()
