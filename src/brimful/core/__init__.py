"""The words every other layer speaks: units, errors and exit codes, the run file, the tape and the forecast.

Only the standard library and PyYAML may be imported here; torch and transformers never are.
"""
