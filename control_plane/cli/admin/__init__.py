"""Commands of operators: on the machine of the control plane."""
