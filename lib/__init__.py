"""How a number is made: knobs, plan, worker groups, timing, checks, rows. Names no library and no section."""
