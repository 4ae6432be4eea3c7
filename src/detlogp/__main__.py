from detlogp.cli import main

raise SystemExit(main())
