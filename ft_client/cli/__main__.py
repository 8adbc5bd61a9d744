"""``python -m ft_client.cli``: the same as the ``ft`` script."""

from ft_client.cli import main

main()
