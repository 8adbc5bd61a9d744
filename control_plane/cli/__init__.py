"""Commands for operators, on the machine of the control plane."""
