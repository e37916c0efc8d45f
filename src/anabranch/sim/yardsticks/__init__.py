"""Other systems' rules of recovery, modelled on the links, devices and churn on which the protocol is run."""
