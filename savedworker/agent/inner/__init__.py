"""What a worker finds at fixed addresses of its private network, served by the agent of whatever instance it is on.

A frozen process keeps addresses in its memory, so they are the same for ever (``checkpoint/network.py`` has them). A service is
a class with the attributes of ``services.Service``; ``InnerServices`` binds it and has the network lead the fixed address there.
"""
