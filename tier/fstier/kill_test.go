package fstier

func writerMain(string) {}
