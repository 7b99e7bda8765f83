"""Parts of a run on other machines: the Ray runtime. Nothing else of the core knows Ray.

    with connect("auto") as connection:             # or None: a Ray of its own on this machine
        plan = ...                                  # made for connection.cluster
        placed = await place(plan, connection)      # devices are taken, or it says what is missing
        pool = RayPool(connection)                  # environments on all nodes
        engine = await RemoteEngine.start(EngineSeat(...))

The driver stays the one controller: it calls the same protocols as without Ray.
"""
