"""The relay: the worker's only way to its engine's interface, at the same inner address on every instance.

``gate`` holds requests around a freeze, ``airflow`` knows what they mean, ``upstream`` carries them, ``journal`` recognises those
that are repeated after a loss, and stores them in ``pieces``; they come in by ``agent.inner``'s server. Of the rest of
``savedworker`` it imports the model only.
"""
