"""Ways of carrying steps to the daemon and answers back."""

import os

# grpc's core logs at INFO by default, and prints a line for every connection that a stopping daemon
# takes leave of; the client says itself, once, what is wrong. grpc reads this when it is loaded, so
# it stands before every module that imports grpc. What the user has set stays.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
