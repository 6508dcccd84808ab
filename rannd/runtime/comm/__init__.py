"""Process groups, devices and collectives on small values.

In: the launcher's environment variables. Out: a `World` (`world.py`, begin there). `rendezvous.py` initialises
torch.distributed, `lockstep.py` checks that all ranks are at the same place of the script, `gather_objects.py` gathers
tensors and errors, `cache_client.py` connects to the daemon.
"""
