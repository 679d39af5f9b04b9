"""What the front asks of an engine, and engines that answer it: in this process, or behind a socket.

The records are plain data, so that they can cross between processes; `seam.py` has them and the protocol.
"""
