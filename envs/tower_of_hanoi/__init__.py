"""Tower of Hanoi: bring all disks onto one peg, never a larger disk onto a smaller one."""
