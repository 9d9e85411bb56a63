"""The composition root: which parts make a control process, and which make each role.

control.execute(order) -> run record, ports, proxy, launcher -> pipeline walks its stages -> all closed in reverse
resume.resume(run)     -> the same, for a run that ended early
walking.walk_monitored -> the stages, with a monitor beside them whose findings become alerts (checks/)
roles.run_role(name)   -> ports of the run -> worker | replica | trainer until it is done or asked to stop
reading                -> what the records of a deployment say, for everybody who only looks
"""
