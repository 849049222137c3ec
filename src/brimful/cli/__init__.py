"""The `brimful` command: one small file per subcommand; nobody imports this package.

Modules here import torch, transformers and PyYAML only inside the functions that need them, so that --help is instant.
"""
