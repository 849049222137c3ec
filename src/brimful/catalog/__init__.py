"""What is known beforehand: GPUs and cloud instances (`gpus.yaml`), models (`models/*.json`), and how to look them up.

Data first: adding a card or a model is adding an entry, with its source, and no code.
Only `core`, the standard library and PyYAML may be imported here; torch and transformers never are.
"""
