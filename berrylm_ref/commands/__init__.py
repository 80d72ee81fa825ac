"""The commands of ``berrylm``, a file each; ``cli.py`` collects them."""
