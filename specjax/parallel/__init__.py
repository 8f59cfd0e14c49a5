"""More than one device: logical-axis rules, shardings, ahead-of-time compilation."""
