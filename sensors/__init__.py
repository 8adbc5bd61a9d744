"""Sensors: each tick reads the control plane's state, asks a policy and yields run requests. Every sensor is level-triggered: it
requests what the present state needs, and run keys make sure that a repeated request starts nothing twice."""
