"""The Ray runtime: environments, engines and learners in actors. No other core package imports Ray.

    with connect("auto") as connection:             # None: starts Ray on this machine
        plan = ...                                  # made for connection.cluster
        placed = await place(plan, connection)      # reserves the devices, reports what is missing
        pool = RayPool()                            # environments on all nodes
        slot = placed.slots["actor_infer"][0]
        engine = await RemoteEngine.start("model", actor_options=slot.options())

The driver is the single controller: it uses the same protocols as without Ray.
"""
