package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

// received is a message as a consumer saw it.
type received struct {
	Topic       string            `json:"topic"`
	Queue       int               `json:"queue"`
	QueueOffset int64             `json:"queue_offset"`
	ID          string            `json:"id"`
	OffsetID    string            `json:"offset_id"`
	Body        []byte            `json:"body"`
	Flag        int32             `json:"flag"`
	SysFlag     int32             `json:"sys_flag"`
	StoreSize   int32             `json:"store_size"`
	Properties  map[string]string `json:"properties"`
}

func describe(message *primitive.MessageExt) received {
	return received{
		Topic:       message.Topic,
		Queue:       message.Queue.QueueId,
		QueueOffset: message.QueueOffset,
		ID:          message.MsgId,
		OffsetID:    message.OffsetMsgId,
		Body:        message.Body,
		Flag:        message.Flag,
		SysFlag:     message.SysFlag,
		StoreSize:   message.StoreSize,
		Properties:  message.GetProperties(),
	}
}

// pushed is a consumer that keeps what it was given, in the order in which it was given.
type pushed struct {
	rocketmq.PushConsumer
	mutex    sync.Mutex
	messages []received
	arrivals chan<- struct{}
}

func (p *pushed) keep(
	_ context.Context, messages ...*primitive.MessageExt,
) (consumer.ConsumeResult, error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for _, message := range messages {
		p.messages = append(p.messages, describe(message))
	}
	select {
	case p.arrivals <- struct{}{}:
	default: // that something has arrived is known already
	}
	return consumer.ConsumeSuccess, nil
}

type consumeArguments struct {
	Name, Group, Topic string
	Expression         string
	Typed              bool // whether the selector says that its expression is one of tags
	Broadcast, Orderly bool
	From               string
}

func (a consumeArguments) selector() consumer.MessageSelector {
	selector := consumer.MessageSelector{Expression: a.Expression}
	if a.Typed {
		selector.Type = consumer.TAG
	}
	return selector
}

var beginnings = map[string]consumer.ConsumeFromWhere{
	"":     consumer.ConsumeFromFirstOffset,
	"last": consumer.ConsumeFromLastOffset,
}

func startPush(s *session, a consumeArguments) (any, error) {
	model := consumer.Clustering
	if a.Broadcast {
		model = consumer.BroadCasting
	}
	made, err := rocketmq.NewPushConsumer(
		consumer.WithNameServer(s.nameServers),
		consumer.WithInstance(a.Name),
		consumer.WithGroupName(a.Group),
		consumer.WithConsumerModel(model),
		consumer.WithConsumerOrder(a.Orderly),
		consumer.WithConsumeFromWhere(beginnings[a.From]),
	)
	if err != nil {
		return nil, err
	}
	p := &pushed{PushConsumer: made, arrivals: s.arrivals}
	if err := made.Subscribe(a.Topic, a.selector(), p.keep); err != nil {
		return nil, err
	}
	s.clients[a.Name] = p
	return nil, made.Start()
}

// await answers with all that the consumers of these names have got, in turn, once it is `Count`
// messages altogether or the time is up.
func await(s *session, a struct {
	Names  []string
	Count  int
	WaitMs int `json:"wait_ms"`
}) (any, error) {
	deadline := time.After(time.Duration(a.WaitMs) * time.Millisecond)
	all := make([][]received, len(a.Names))
	for {
		total := 0
		for i, name := range a.Names {
			p, err := find[*pushed](s, name)
			if err != nil {
				return nil, err
			}
			p.mutex.Lock()
			all[i] = append([]received{}, p.messages...)
			p.mutex.Unlock()
			total += len(all[i])
		}
		if total >= a.Count {
			return all, nil
		}
		select {
		case <-s.arrivals:
		case <-deadline:
			return all, nil
		}
	}
}

// settle waits until everything that the broker has in a topic of one queue is consumed and its
// offset is known to the client, so that stopping the consumer commits the end of the queue.
func settle(s *session, a struct{ Name, Topic string }) (any, error) {
	p, err := find[*pushed](s, a.Name)
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		if behind, known := p.GetOffsetDiffMap()[a.Topic]; known && behind == 0 {
			return nil, nil
		}
		time.Sleep(5 * time.Millisecond) // the client tells nobody when it moves an offset
	}
	return nil, fmt.Errorf("%s is still behind in %s after %s", a.Name, a.Topic, patience)
}
