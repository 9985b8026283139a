package e2e

func wrapMain() {}
