"""The ranks of a job and what they tell each other.

In: the environment that a launcher leaves. Out: a `World` (`world.py`, begin there): `rendezvous.py` connects its
ranks, `device.py` chooses their devices; `lockstep.py`: what ranks compare before they act together;
`gather_objects.py`: state on its way between ranks; `cache_client.py`: the way to the daemon.
"""
