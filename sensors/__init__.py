"""What runs on a tick: read the control plane's state, ask a policy, yield run requests. Every sensor is level-triggered:
it asks for what the present state needs, and a run key makes sure that asking twice starts once.
"""
