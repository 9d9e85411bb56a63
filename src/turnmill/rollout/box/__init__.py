"""Untrusted environment code in its box: a child process that may talk to the model and to nobody else.

    BoxedRunner -> Box (parent's end) == control socket == player (child) -> environment
                   '-> warden -> namespaces | another uid | bwrap -> limits -> player
    environment -> chat -> relay (in the parent) -> proxy

`warden`, `kernel`, `view` and `order` import nothing but the standard library: they run before privileges are dropped.
"""
