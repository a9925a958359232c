"""Interpretation replaces functions of `triton.language` for its duration, in the whole process. Whoever interprets
or compiles holds this lock."""

import threading

language_lock = threading.RLock()
