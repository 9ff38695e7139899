"""The test bed for instances of a cloud: machines and containers in which the agent's own installation and start are executed.

A machine is a host of the local fleet; a container on it is runc's, made as ECS makes a privileged one.
"""
