"""What a training step is: model, adapters, attention, dropout, loss, optimizer, recomputation, and the step itself.

The forecast traces this code, the trainer repeats it, `measure` checks one against the other: there is no second
description of a step. May import `core` and `catalog`; nothing here knows about forecasting.
"""
