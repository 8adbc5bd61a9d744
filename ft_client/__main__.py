"""``python -m ft_client``: the same as the ``ft`` script."""

from ft_client.cli import main

main()
